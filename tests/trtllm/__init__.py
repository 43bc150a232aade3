"""TensorRT-LLM's b12x MoE backend as a stand-in, driven through FlashInfer's real wheels."""
