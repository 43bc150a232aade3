"""NVFP4 number formats and storage layouts as pure tensor mathematics.

Nothing here knows what a mixture of experts, a checkpoint or a framework is. Scales are always
*dequantizing multipliers*: ``value = code * block_scale * global_scale``. A reciprocal says so in
its name.
"""
