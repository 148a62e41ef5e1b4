"""The demo with a pretrained language model: SmolLM2-135M learns to list words that begin with a letter."""
