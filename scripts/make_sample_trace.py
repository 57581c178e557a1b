#!/usr/bin/env python3
"""Writes examples/traces/sample.jsonl: a made-up serving trace in the public Mooncake format.

    scripts/make_sample_trace.py > examples/traces/sample.jsonl

One request a line: timestamp in ms, input_length and output_length in tokens, hash_ids with one id
for each 512 tokens of the input; equal ids mean an equal block after an equal prefix. Three kinds
of users, so that every path of a server is walked: conversations that grow turn by turn under a
shared system prompt, documents that several questions are asked about, and short single requests.
The same seed gives the same bytes.
"""

import json
import random

SEED = 20
BLOCK = 512
SYSTEM_PROMPTS = [512, 1024, 1536]  # tokens
CONVERSATIONS = 16
DOCUMENTS = 4
SINGLES = 18


class Content:
    """A text that only grows, and the ids of its blocks."""

    next_id = 0

    def __init__(self, base=None):
        self.tokens = base.tokens if base else 0
        self.ids = list(base.ids) if base else []

    def grow(self, tokens):
        """Appends new text. A block that it changes is another block from now on."""
        del self.ids[self.tokens // BLOCK :]
        self.tokens += tokens
        while len(self.ids) * BLOCK < self.tokens:
            self.ids.append(Content.next_id)
            Content.next_id += 1
        return self


def conversation(rng, system, start):
    """Turns of one user: each prompt is the whole talk so far."""
    talk = Content(system)
    for _ in range(rng.choice([1, 2, 3, 4, 5])):
        talk.grow(int(rng.lognormvariate(4.8, 0.9)) + 4)
        answer = max(1, min(420, int(rng.lognormvariate(4.2, 0.9))))
        yield start, talk, answer
        talk.grow(answer)
        start += rng.uniform(4_000, 15_000)


def document(rng, start):
    """Questions about one long text."""
    text = Content().grow(rng.randrange(2_500, 4_200))
    for _ in range(rng.choice([2, 3])):
        question = Content(text).grow(rng.randrange(12, 80))
        yield start, question, rng.randrange(40, 260)
        start += rng.uniform(500, 6_000)


def single(rng, start):
    """One short question, among them the shortest there can be."""
    tokens = rng.choice([1, rng.randrange(8, 700)])
    yield start, Content().grow(tokens), rng.choice([1, rng.randrange(2, 300)])


def main():
    rng = random.Random(SEED)
    systems = [Content().grow(tokens) for tokens in SYSTEM_PROMPTS]
    requests = []

    def serve(kind):
        for start, content, answer in kind:
            requests.append((int(start), content.tokens, answer, list(content.ids)))

    for _ in range(CONVERSATIONS):
        serve(conversation(rng, rng.choice(systems), rng.uniform(0, 30_000)))
    for _ in range(DOCUMENTS):
        serve(document(rng, rng.uniform(0, 50_000)))
    for _ in range(SINGLES):
        serve(single(rng, rng.uniform(0, 60_000)))

    for timestamp, input_length, output_length, hash_ids in sorted(requests):
        print(
            json.dumps(
                {
                    "timestamp": timestamp,
                    "input_length": input_length,
                    "output_length": output_length,
                    "hash_ids": hash_ids,
                }
            )
        )


if __name__ == "__main__":
    main()
