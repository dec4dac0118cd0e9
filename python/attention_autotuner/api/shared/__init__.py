"""Launch plans, argument checks and autograd helpers that the public functions share."""
