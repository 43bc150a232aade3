"""From a saved reply to a verdict: what came back, what the answer is, whether it is right."""
