"""Which planned step a call takes: everything that a forward can read tells two calls apart, at little cost."""

import gc
import weakref

import torch
from torch import nn

from gcsolve.execution.signature import AttributeCache, signature, walk
from gcsolve.util.tree import flatten


class Scaled(nn.Module):
    """A number, a tuple, a list and a tensor among its attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.shape, self.parts, self.kept = 0.5, (1, 2), [1, 2], None

    def forward(self, x):
        return self.linear(x) * self.scale


def keys_of(model):
    """A function: the key of a call of `model` as it is then, with what is known from the calls before."""
    tensors, template = flatten(((torch.ones(2, 4),), {}), "call")
    attributes = AttributeCache()

    def key():
        found = signature(model, tensors, template, attributes)
        assert found == signature(model, tensors, template)  # as without any memory
        return found

    return key


def test_walk_is_named_modules():
    model = nn.Sequential(Scaled(), nn.Sequential(nn.ReLU(), nn.Dropout()))
    model.append(model[0])  # the same module twice
    model.register_module("none", None)
    assert walk(model) == list(model.named_modules(remove_duplicate=False))


def test_every_change_is_seen():
    model = nn.Sequential(Scaled(), nn.Dropout(0.1))
    key = keys_of(model)
    keys = [key()]
    assert key() == keys[0]

    def changed():
        keys.append(key())
        assert keys[-1] not in keys[:-1]

    model[0].scale = 0.25
    changed()
    model[0].scale = 1
    changed()
    model[0].scale = True  # equals 1, and is not the same
    changed()
    model[0].shape = (1, 3)
    changed()
    model[0].parts.append(3)  # the same list
    changed()
    model[0].parts = (1, [2])
    changed()
    model[0].parts[1].append(3)
    changed()
    model[0].kept = torch.ones(3)
    changed()
    model[0].more = None
    changed()
    model[0].less = vars(model[0]).pop("more")  # the same value under another name
    changed()
    model[1].p = 0.2
    changed()
    model.eval()
    changed()
    model[1] = nn.Identity()
    changed()
    model[0].linear.weight.requires_grad_(False)
    changed()
    model[0].linear.register_forward_hook(lambda *_: None)
    changed()
    model.append(nn.Identity())
    changed()


def test_a_number_in_the_place_of_another_is_seen():
    """Floats come and go at the same addresses; the cache holds on to those that it knows by theirs."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    key = keys_of(model)
    for n in range(2000):
        model[n % 2].p = n / 4000
        before = key()
        for other in range(8):
            model[n % 2].p = (n + other + 1) / 8000 + 0.5
        assert key() != before


def test_no_tensor_is_held():
    model = Scaled()
    key = keys_of(model)
    model.kept = torch.ones(3)
    model.parts = [torch.ones(3)]
    seen = [weakref.ref(model.kept), weakref.ref(model.parts[0])]
    key()
    model.kept = model.parts = None
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
