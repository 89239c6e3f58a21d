"""What a dialog asked for is done after it has gone: planning outlasts it, and it is deleted as it hides."""

import asyncio
import gc

import pytest

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

from studio_for_tests import until, with_user

pytestmark = pytest.mark.usefixtures("empty_folder")
ROW = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}'


@pytest.mark.parametrize("kind", ["pasted rows", "a model that fits"])
def test_the_work_after_a_dialog_keeps_its_page(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nicegui import ui

    from bloomery.studio import fitting_models
    from bloomery.studio.data_given import GivenData

    model = "google/gemma-3-270m-it"
    monkeypatch.setattr(fitting_models, "known_models", lambda: [model])

    async def visit(user) -> None:
        answers = list[str]()
        pages = list[object]()
        is_gone = asyncio.Event()

        async def work(answer: str) -> None:
            answers.append(answer)
            await is_gone.wait()
            pages.append(ui.context.client)

        @ui.page("/asks")
        def page() -> None:
            GivenData(ui.element(), on_data=work, on_mistake=lambda _: None)
            ui.button("What fits?", on_click=lambda: fitting_models.ask_what_fits(work))

        await user.open("/asks")
        if kind == "pasted rows":
            user.find("Paste").click()
            await user.should_see(ui.textarea)
            user.find(ui.textarea).type(ROW)
            user.find("Use it").click()
        else:
            user.find("What fits?").click()
            await user.should_see("1,000 chats of 600 tokens", retries=100)
            user.find("Use").click()
        await until(lambda: answers)
        # The browser has hidden it.
        dialogs = [one for one in user.client.elements.values() if isinstance(one, ui.dialog)]
        for dialog in dialogs:
            dialog.delete()
        assert dialogs
        del dialogs, dialog
        gc.collect()
        is_gone.set()
        await until(lambda: pages)
        assert pages == [user.client]

    with_user(visit)
