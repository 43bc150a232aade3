"""The layer that owns expert weights."""

from torch import nn

from .construction import set_attributes


class MoE(nn.Module):
    """Hands every step of its weights' life to ``self.quant_method``."""

    def __init__(
        self,
        *,
        routing_method,
        num_experts,
        hidden_size,
        intermediate_size,
        model_config,
        activation_type,
    ):
        super().__init__()
        set_attributes(
            self,
            routing_method,
            num_experts,
            hidden_size,
            intermediate_size,
            model_config,
            activation_type,
        )
        self._weights_created = False
        self.create_weights()

    def create_weights(self):
        if not self._weights_created:
            self.quant_method = self._get_quant_method()
            self.quant_method.create_weights(self)
            self._weights_created = True

    def load_weights(self, weights, allow_partial_loading=False):
        self.quant_method.load_weights(self, weights, "vanilla", allow_partial_loading)

    def post_load_weights(self):
        self.quant_method.post_load_weights(self)

    def process_weights_after_loading(self):
        self.quant_method.process_weights_after_loading(self)

    def pre_reload_weights(self):
        self.quant_method.pre_reload_weights(self)
