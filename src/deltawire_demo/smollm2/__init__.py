"""The demo with a pretrained language model: SmolLM2-135M learns to describe things with words that begin with s."""
