"""What a model is made of, read from its Hugging Face config: every weight, and what each layer caches."""
