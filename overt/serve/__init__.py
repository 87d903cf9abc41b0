"""A page to ask models where they look, served to this machine (`overt serve`).

`shelf` holds the models, `questions` says what may be asked and how large it may be, `replies`
answers, `line` lets people wait their turn, `app` joins them and hands out the page.
"""
