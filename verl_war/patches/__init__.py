"""The only assignments to names of verl, vLLM and torch."""
