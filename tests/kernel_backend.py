"""The emulator in the kernel's place: what tests/flashinfer/worker.py calls at the launch.

FlashInfer's own wrapper and dispatch have run by then; this sees only the tensors and flags that
the GPU kernel would have got, and insists that the contract says the same about the kernel.
"""

from __future__ import annotations

from typing import Any

from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import Arithmetic, KernelFamily, OutputSum, QuantMath
from trtllm_b12x_fix.emulator.contract import InputQuantization, Shape, contract_for
from trtllm_b12x_fix.layer import Activation

ORDER_SEED = 0
#: Stands for whatever capacity gave a CUDA-graph wrapper its 128-row tile.
_ANY_CAPACITY = 1_000_000


def emulate(call: Any) -> None:
    """Fill ``call.output``; ``call`` is a tests.flashinfer.harness.KernelCall."""
    _emulate(call, ORDER_SEED)


def emulate_in_slot_order(call: Any) -> None:
    """The same with atomic adds in slot order, for comparisons without our random order."""
    _emulate(call, None)


def _emulate(call: Any, order_seed: int | None) -> None:
    activation = Activation(call.activation)
    shape = Shape(
        tokens=call.x.shape[0],
        top_k=call.expert_ids.shape[1],
        hidden=call.x.shape[1],
        intermediate=call.n,
        experts=call.w1_packed.shape[0],
        activation=activation,
        graph_capacity=_ANY_CAPACITY if call.mma_tiler_mn == (128, 128) else None,
        sharing=(InputQuantization.SHARED if call.input_gs_shared else InputQuantization.PER_ROUTE),
    )
    arithmetic = contract_for(call.version).arithmetic(KernelFamily(call.family), shape)
    _insist_on_the_kernel(call, arithmetic)
    launch = moe.LaunchTensors(
        w1_packed=call.w1_packed,
        w1_block_scale=call.w1_block_scale,
        w2_packed=call.w2_packed,
        w2_block_scale=call.w2_block_scale,
        w1_alpha=call.w1_alpha,
        w2_alpha=call.w2_alpha,
        # The dispatch broadcasts scalars to [E]; the flag says whether it quantizes once.
        input_global_scale=call.input_gs,
        fc2_input_scale=call.down_input_scale,
        activation=activation,
    )
    routing = moe.Routing(call.expert_ids, call.expert_weights)
    trace = moe.run(launch, call.x, routing, arithmetic, order_seed)
    call.output.copy_(trace.output)


def _insist_on_the_kernel(call: Any, arithmetic: Arithmetic) -> None:
    """The kernel object's own flags must agree with the arithmetic of the contract."""
    if call.family != "direct-micro":
        fast = arithmetic.quant_math is QuantMath.FAST
        assert call.fast_math == fast, (call.kernel_class, call.fast_math, arithmetic)
    gated = call.kernel_class.startswith("gated.")
    retained = arithmetic.output_sum is OutputSum.BF16_ATOMICS_RETAINED
    assert gated == retained, (call.kernel_class, arithmetic)
    assert not call.input_scales_are_reciprocal
