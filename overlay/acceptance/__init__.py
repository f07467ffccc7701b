"""What a served model must show before anybody relies on it, asked over the OpenAI API: `python -m overlay accept`."""
