"""``python -m trtllm_b12x_fix``: the same as the ``trtllm-b12x-fix`` command."""

import sys

from trtllm_b12x_fix.cli import main

sys.exit(main())
