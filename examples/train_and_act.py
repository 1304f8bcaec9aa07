"""Train an agent, load it, and play an episode with it: `python examples/train_and_act.py`."""

import gymnasium

import troupe

outcome = troupe.train("CartPole-v1", name="example", fresh=True, seed=1)
print(f"{outcome.reason} in {outcome.seconds:.1f} s")

agent = troupe.load("example")
env = gymnasium.make("CartPole-v1")
observation, _ = env.reset(seed=7)
total, ended = 0.0, False
while not ended:
    observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
    total += float(reward)
    ended = terminated or truncated
print(f"an episode of {total:.0f}")
