"""What a search leaves for people and programs."""
