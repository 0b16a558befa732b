"""Text: readers, cleaning, tokenizers."""
