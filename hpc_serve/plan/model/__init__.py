"""A model by its Hugging Face config: every weight, and what each layer caches."""
