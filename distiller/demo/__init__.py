"""What the packaged demonstration recipes need and no other recipe does."""
