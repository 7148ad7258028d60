"""Policy losses (algorithms.md 4): one file for each name of `learner.loss.name`, with

    token_loss(tokens, settings) -> TokenLoss      the token losses of one micro-batch
    select(whole, settings, draw_K) -> Tensor      optional: tokens chosen from the whole minibatch, `[K]` bool

and the same as a pure function of tensors beside it. Adding a loss adds a file, its class in rl_core/loss_settings.py,
its golden numbers and its line in the document.
"""
