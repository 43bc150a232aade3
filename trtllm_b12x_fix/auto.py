"""``import trtllm_b12x_fix.auto``: one line that switches the repair on, here and in children.

At the top level of a launch script it also reaches mpi4py's workers, which run that top level
again; the start-up file reaches them wherever it stands.
"""

from trtllm_b12x_fix.fix import apply

apply()
