"""Web server of `overt serve`: query models about images and text, and view their attention.

`model_cache` loads the models, `request_schema` defines the requests and their limits, `responses`
answers them, `request_queue` runs one at a time, and `app` serves the page and the API.
"""
