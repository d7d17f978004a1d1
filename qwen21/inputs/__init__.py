"""Inputs of the networks: pictures, references, the prompt template and the tokenizer."""
