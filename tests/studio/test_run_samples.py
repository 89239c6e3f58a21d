"""What the model of a run writes, by step: samples, and completions that are episodes with tools."""

import pytest
from studio_for_tests import episode, make_run, texts_of, until, with_user, write_rollout

from bloomery.monitor.events import EventLog, Sampled
from bloomery.report.rewards import ShownTurn
from runs_for_tests import step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def sampled(step: int, prompt: str, completion: str) -> Sampled:
    return Sampled(step=step, prompt=prompt, completion=completion)


def slider_of(user, name: str):
    from nicegui import ui

    (slider,) = [e for e in user.find(ui.slider).elements if e.props["aria-label"] == name]
    return slider


def test_of_each_prompt_the_newest_until_a_step_and_the_first() -> None:
    from bloomery.studio.run_samples import samples_at

    first, second = sampled(10, "a", "one"), sampled(20, "a", "two")
    other = sampled(20, "b", "only")
    again = sampled(10, "a", "after a resume")
    samples = [first, second, other, again]
    assert samples_at(samples, 20) == [(second, first), (other, other)]
    assert samples_at(samples, 10) == [(again, first)]
    assert samples_at(samples, 5) == samples_at(samples, None) == []


def test_results_belong_to_the_calls_before_them() -> None:
    from bloomery.studio.run_samples import in_talk

    two_calls = ShownTurn("assistant", "so", calls=(("add", "1"), ("add", "2")))
    results = [ShownTurn("tool", str(number), "add") for number in range(3)]
    last = ShownTurn("assistant", "done")
    assert [*in_talk([two_calls, *results[:2], last])] == [(two_calls, results[:2]), (last, [])]
    # A call whose result is cut off, and a result whose call is.
    assert [*in_talk([two_calls, results[0]])] == [(two_calls, results[:1])]
    assert [*in_talk([two_calls, *results])][1:] == [(results[2], [])]
    assert [*in_talk(results[:1])] == [(results[0], [])]


def test_a_slider_chooses_the_step_of_the_samples_and_follows_the_newest() -> None:
    folder = make_run("demo", events=[step_done(10), sampled(10, "a", "one")])

    async def visit(user) -> None:
        def samples() -> set[str]:
            return {*texts_of(user)} & {"one", "two", "three", "four"}

        def log(sample: Sampled) -> None:
            with EventLog(folder / "events.jsonl") as events:
                events(sample)

        await user.open("/run/demo")
        await user.should_see("one", retries=50)
        log(sampled(20, "a", "two"))
        log(sampled(30, "a", "three"))
        await until(lambda: samples() == {"three", "one"})  # what it wrote at first is beside it
        slider = slider_of(user, "Samples of step")
        assert slider.props["max"] == 2
        slider.value = 1
        await until(lambda: samples() == {"two", "one"})
        await user.should_see("step 20, 2 of 3")
        log(sampled(40, "a", "four"))
        await user.should_see("step 20, 2 of 4", retries=50)  # which stays
        assert samples() == {"two", "one"}
        slider.value = 0
        await until(lambda: samples() == {"one"})

    with_user(visit)


def test_an_episode_is_a_talk_with_its_calls_folded() -> None:
    folder = make_run("demo")
    write_rollout(folder, 1, episode(0.1))

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/run/demo")
        await user.should_see("Episodes", retries=50)
        texts = texts_of(user)
        assert "THE WHOLE TEXT" not in texts
        assert {"user: find it", "again", "it is here", "0.100"} <= {*texts}
        assert {"environment", "0.000", "format", "0.500"} <= {*texts}
        assert {'{"word": "<b>"}', "failed", '{"error": "not an object"}'} <= {*texts}
        assert "not an object" not in " ".join(text for text in texts if "error" not in text)
        folds = [e for e in user.find(ui.element).elements if e.tag == "details"]
        assert len(folds) == 2
        shortened = next(text for text in texts if text.startswith("→ here"))
        assert shortened.endswith("…") and len(shortened) < 70

        write_rollout(folder, 2, episode(0.2), episode(0.3))
        await user.should_see("step 2, 2 completions: the best, a middle and the worst", retries=50)
        slider = slider_of(user, "Rollout of step")
        slider.value = 0
        await until(lambda: "0.100" in texts_of(user))
        write_rollout(folder, 3, episode(0.4))
        await user.should_see("step 1, 1 of 3", retries=50)
        assert "0.100" in texts_of(user) and "0.400" not in texts_of(user)

    with_user(visit)


def test_a_folder_of_no_rollout_and_a_damaged_file_spoil_no_page() -> None:
    folder = make_run("demo")
    write_rollout(folder, 1)
    (folder / "completions" / "notes.txt").write_text("mine")

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("Events")
        (folder / "completions" / "step-00000002.jsonl").write_text("{no json}\n")
        await user.should_see("step 2, 0 completions, 1 damaged lines left out", retries=50)

    with_user(visit)
