"""Images: files, decoding, the cache of decoded pixels, augmentation."""
