"""The only place that knows foreign symbols: FlashInfer here; TensorRT-LLM and vLLM to come."""
