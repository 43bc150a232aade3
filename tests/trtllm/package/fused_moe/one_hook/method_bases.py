"""Base classes of the quantization methods, where ``post_load_weights`` is the only hook."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from . import loading


class FusedMoEQuantScalesNVFP4(NamedTuple):
    """What the CUTLASS kernel gets, in its order."""

    fc1_act_global: torch.Tensor
    fc1_weight_block: torch.Tensor
    fc1_global: torch.Tensor
    fc2_act_global: torch.Tensor
    fc2_weight_block: torch.Tensor
    fc2_global: torch.Tensor


class FusedMoEMethodBase(ABC):
    """Life of a layer's weights; every method gets the layer as ``module``."""

    @classmethod
    def need_load_shared_weights(cls, module):
        balancer = getattr(module, "layer_load_balancer", None)
        return bool(balancer) and balancer.need_load_shared_weights()

    def load_weights(self, module, weights, weight_loading_mode, allow_partial_loading=False):
        self.load_quant_scales(module, weights[0])
        if not allow_partial_loading:
            self.process_weights_after_loading(module)

    def load_quant_scales(self, module, weights):
        raise NotImplementedError

    def process_weights_after_loading(self, module):
        raise NotImplementedError

    def _finalize_shared_weights(self, module):
        assert not self.need_load_shared_weights(module)

    def post_load_weights(self, module):
        self._finalize_shared_weights(module)
        if getattr(module, "layer_load_balancer", None):
            module.layer_load_balancer.set_initial_weight_assignments(())
        self.setup_quant_scales(module)

    @abstractmethod
    def setup_quant_scales(self, module):
        raise NotImplementedError

    def pre_reload_weights(self, module):
        # Nothing here replaces a parameter, so there is nothing to rebuild.
        assert not module.rebuild_tensor_metadata


class NVFP4FusedMoEMethod(FusedMoEMethodBase):
    """NVFP4 weights for any kernel."""

    def create_weights(self, module):
        loading.create_parameters(module)
        self.setup_quant_scales(module)

    def load_quant_scales(self, module, weights):
        loading.stage(module, weights)

    def process_weights_after_loading(self, module):
        loading.finish_scales(module)
        self.setup_quant_scales(module)

    def setup_quant_scales(self, module):
        module.quant_scales = FusedMoEQuantScalesNVFP4(
            module.fc31_input_scale,
            module.w3_w1_weight_scale,
            module.fc31_alpha,
            module.fc2_input_scale,
            module.w2_weight_scale,
            module.fc2_alpha,
        )


class NVFP4CutlassFusedMoEMethod(NVFP4FusedMoEMethod):
    """NVFP4 weights as CUTLASS wants them: padded rows, swizzled scales."""

    def process_weights_after_loading(self, module):
        loading.finish_layouts(module)
        super().process_weights_after_loading(module)
