"""What ``examples.train_gpt`` is made of: a model, its text, its training, and the judgement of two loss curves."""
