"""The plugin, against vLLM's real classes on a CPU."""
