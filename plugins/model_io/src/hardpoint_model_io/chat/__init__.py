"""Chat templates: the chat renderer ``jinja`` and the sandbox it runs models' templates in."""
