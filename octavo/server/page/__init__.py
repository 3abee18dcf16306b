"""The page at `/` that shows the running server: its files (`static`), and the JSON that they ask for."""
