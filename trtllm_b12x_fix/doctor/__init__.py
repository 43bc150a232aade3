"""What is true of an environment, and whether its b12x layers compute with exact scales.

Start at :mod:`.diagnosis`. Nothing here imports TensorRT-LLM or FlashInfer, or needs a GPU.
"""
