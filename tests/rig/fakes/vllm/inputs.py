class TokensPrompt:
    prompt_token_ids: list
