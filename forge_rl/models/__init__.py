"""Model files: resolved by name, bundled, and dequantised."""
