"""The student's weights and AdamW's moments as pieces, the same under every engine."""
