"""From files to :class:`trtllm_b12x_fix.layer.MoELayer`: every foreign name lives here.

Only safetensors and JSON are read, never pickles.
"""
