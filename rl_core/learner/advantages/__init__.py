"""Advantage estimators (algorithms.md 3): one file for each name of `learner.advantage.name`, with one of

    estimate(answers, settings) -> [N]                        one advantage for all tokens of an answer
    estimate_tokens(answers, settings) -> [K]                 one for every loss token
    estimate_from_policy(answers, policy, settings) -> [K]    the same, from what the proximal policy said of them

and the same as a pure function beside it. Adding an estimator adds a file, its class in rl_core/advantage_settings.py,
its golden numbers and its line in the document.
"""
