"""Is a served model's output right? Known continuations asked of an OpenAI-style server.

What it can see is wreckage: a mixture-of-experts backend that computes something else, as in
vllm#52308. What it cannot see is a few percent of error: baked block scales (TensorRT-LLM#21461)
cost 8-9% of a layer's output and no measured answer. Standard library only, so that it runs
inside the container that serves.
"""
