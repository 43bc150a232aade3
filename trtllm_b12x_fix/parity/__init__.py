"""Whether trtllm-gen's NVFP4 MoE is right: what it is handed, what it returns, and what breaks.

Pure tensor mathematics. vLLM and FlashInfer come in as functions, from ``integrations``.
"""
