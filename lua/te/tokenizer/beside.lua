--- Names of the files that a tokenizer is in, the first for us and all of them for Transformers.
return { "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja" }
