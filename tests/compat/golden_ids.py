"""
The ids of the checkpoint that ``checkpoint.py`` builds, at step 2.

Changing one of OBJECTS, VERSIONS, STATES and COMMIT is a change of format: what users have stored would no longer
be recognised. COMPOSED are the files of a composite; they may change with the writer, if that is meant.
Written by ``python -m tests.compat.goldens``.
"""

COMMIT = "8aa398e184cb937163e655a10acfc4d2"

OBJECTS = {
    "model.embed_tokens weights 0/2": "5f4e5323973fbe90f4c8fd29844634b7",
    "model.embed_tokens weights 1/2": "5c80b64b11966eb087e36e4939692629",
    "model.layers.0 master 0/2": "6c4833a88af1a8dcf3cb586306bd9740",
    "model.layers.0 master 1/2": "cbbbc80196a5a79c40363545ac04505b",
    "model.layers.0 optimizer 0/2": "880913dcb2877c464f0d1fe67b1ad962",
    "model.layers.0 optimizer 1/2": "f80ca008d8a2496cc92d42222192ebc8",
    "model.layers.0 buffers 0/1": "efff604de650e7fbefcc62c4edcb7b20",
    "model.norm weights 0/1": "ee1b96629dfa8c03582d787d3c2ca584",
    "model.norm master 0/2": "ed845552408827cf3149271e71e46587",
    "model.norm master 1/2": "df8b5f02154ca68e1b942f89c74f5fd6",
    "model.norm optimizer 0/2": "09e40fa3ce5ad1583eeb65ee5d04eb2d",
    "model.norm optimizer 1/2": "af7d12f020d1058c7042a8f94a15543f",
}

VERSIONS = {
    "model.embed_tokens": "f2f6fd972495f2ef696e72a23d8aa6e7",
    "model.layers.0": "bf209a38e3f051ddd6f1090c7cea62c6",
    "model.norm": "9fba231d5abbd3bc0303bd01b65f97d8",
}

STATES = {
    "rank 0": "a8bbdb53cf68b3b48ac644936dbaded6",
    "rank 1": "fe7005d77972467958f0c33f8b5f6299",
}

COMPOSED = {
    "config.json": "53bd6caa5a6643d387a5c9605cd323dc",
    "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "dfa8a11e8ff715a47236cea60d7ee7f6",
    "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": "e49d0fb59150bd00815dfdcd9cdbaaec",
    "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt": "17836399a2f1bce6e97e36d3355e9120",
    "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt": "e7aba4d0386b3b18a692b9ec916854d5",
    "latest": "9d08d0bf7f76289f7868402c40051696",
    "model.safetensors": "57fdaf8920ce9e9d846ff086e6d376f4",
    "rng_state_0.pth": "435974f7e71081e2b5623efed3ac69fd",
    "rng_state_1.pth": "a8b794faa64c09d538821f6619cfed75",
    "tokenizer.json": "c34d57e9de4bf388a8f6ff77cd89bc6b",
    "trainer_state.json": "e563ff94f1aec64fb42515bc7984d230",
}
