"""What the import hook waits for. Every start of Python reads this: no imports here."""

#: The class that bakes its scales lives in one of these: newer TensorRT-LLM first, then older.
TARGET_MODULES = (
    "tensorrt_llm._torch.moe.fused_moe.quantization",
    "tensorrt_llm._torch.modules.fused_moe.quantization",
)

#: Called as ``(module, settings)`` once a target was imported; returns a TargetPlan.
CALLBACK = "trtllm_b12x_fix.integrations.tensorrt_llm:on_import"
