"""What the import hook waits for. Every start of Python reads this: no imports here."""

#: The class that bakes its scales lives in one of these: newer TensorRT-LLM first, then older.
TARGET_MODULES = (
    "tensorrt_llm._torch.moe.fused_moe.quantization",
    "tensorrt_llm._torch.modules.fused_moe.quantization",
)

#: Called as ``(module, settings)`` once a target was imported; returns a TargetPlan.
CALLBACK = "trtllm_b12x_fix.integrations.tensorrt_llm:on_import"

_EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
#: vLLM's class that bakes; the module is imported when somebody asks for this backend.
VLLM_B12X = f"{_EXPERTS}.flashinfer_b12x_moe"
#: What vLLM prefers to CUTLASS on SM100, and imports on any GPU once an NVFP4 layer is built.
VLLM_GUARDED = (f"{_EXPERTS}.trtllm_nvfp4_moe", f"{_EXPERTS}.flashinfer_cutedsl_moe")
VLLM_MODULES = (VLLM_B12X, *VLLM_GUARDED)
VLLM_CALLBACK = "trtllm_b12x_fix.integrations.vllm:on_import"
