"""Pure tensor functions: advantages, losses, logprobs and KL estimators."""
