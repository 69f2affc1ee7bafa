"""What a problem costs: pairs, tiles, FLOPs and bytes, from its facts alone where they suffice."""
