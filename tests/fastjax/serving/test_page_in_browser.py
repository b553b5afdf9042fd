"""The page in a headless Chromium, against a server whose answers are known: what it does."""

import json
import math
import re
import time

import pytest

from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.generation.text import answers
from tests.support import page_server, serving
from tests.support.browser import WIDTHS, ask, texts, tip
from tests.support.page_server import ADAPTER, BASE, HOSTILE, HOSTILE_NAME, KEY, TEXTS, THOUGHT, Script, listening

pytestmark = [
    pytest.mark.exhaustive(by="tests/fastjax/serving/test_page.py::test_every_file_of_the_page_is_served_and_no_other")
]


def test_an_answer_comes_in_pieces_and_the_next_question_has_it(opened):
    script = Script()
    with listening(script.app) as address:
        page = opened(address)
        page.wait_for_selector("#model option", state="attached")
        page.fill("#field-system", "Be brief.")
        page.fill("#field-temperature", "0.5")
        page.fill("#field-top_k", "40")
        ask(page, "think long about rates", wait=False)
        page.locator(".answer > .text .token").nth(5).wait_for()
        assert page.is_visible("#stop") and not page.is_visible("#send")
        assert page.locator(".thought .text").text_content() == THOUGHT
        page.click("#stop")
        page.wait_for_selector("#send:not([hidden])")
        partial = texts(page)[0]
        assert (TEXTS[BASE] * 200).startswith(partial[:40]) and 40 < len(partial) < len(TEXTS[BASE]) * 200
        assert re.match(r"\d+ tokens · .* · stopped$", page.locator(".figures").text_content())
        ask(page, "And then?")
        assert texts(page)[1] == TEXTS[BASE]
        assert re.fullmatch(
            r"1\d tokens · [\d,.]+ tokens/s · first after [\d,.]+ m?s", page.locator(".figures").nth(1).text_content()
        )
        first, second = script.bodies
        assert first["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "think long about rates"},
        ]
        assert second["messages"][2:] == [
            {"role": "assistant", "content": partial, "reasoning_content": THOUGHT},
            {"role": "user", "content": "And then?"},
        ]
        for body in script.bodies:
            given = {name: value for name, value in body.items() if name != "messages"}
            assert given == {
                "model": BASE,
                "stream": True,
                "stream_options": {"include_usage": True},
                "logprobs": True,
                "top_logprobs": 5,
                "temperature": 0.5,
                "top_k": 40,
            }
        assert page.logged == []
    assert script.ended == ["left", "whole"]


def test_base_beside_adapter_each_with_its_own_answers(opened):
    script = Script()
    with listening(script.app) as address:
        page = opened(address)
        page.wait_for_selector("#beside option", state="attached")
        page.select_option("#beside", ADAPTER)
        ask(page, "first")
        assert texts(page) == [TEXTS[BASE], TEXTS[ADAPTER]]
        assert page.locator(".answer h3").all_text_contents() == [BASE, ADAPTER]
        boxes = [answer.bounding_box() for answer in page.locator(".answer").all()]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
        page.set_viewport_size({"width": 390, "height": 844})
        boxes = [answer.bounding_box() for answer in page.locator(".answer").all()]
        assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] + boxes[0]["height"] < boxes[1]["y"]
        page.select_option("#model", ADAPTER)
        page.select_option("#beside", "")
        ask(page, "second")
        assert script.bodies[-1]["model"] == ADAPTER
        assert script.bodies[-1]["messages"][1] == {"role": "assistant", "content": TEXTS[ADAPTER]}
        page.locator(".retry:visible").click()
        page.wait_for_selector("#send:not([hidden])")
        assert len(script.bodies) == 4 and script.bodies[3] == script.bodies[2]
        assert len(texts(page)) == 3 and page.locator(".retry:visible").count() == 1
        page.click("#clear")
        assert page.is_visible("#welcome") and texts(page) == []
        assert page.logged == []


def test_a_tokens_probability_and_alternatives_by_pointer_and_by_keyboard(opened):
    with listening(Script().app) as address:
        page = opened(address)
        ask(page, "think about rates")
        spans = page.locator(".answer > .text .token")
        words = page_server.words(TEXTS[BASE])
        assert spans.all_text_contents() == words
        assert spans.nth(2).get_attribute("data-level") == "2"
        spans.nth(2).hover()
        assert tip(page) == ("30.0 %", [("␣instead", "35.0 %"), ("␣rate", "30.0 %"), ("(no text)", "17.5 %")])
        assert spans.nth(2).get_attribute("aria-describedby") == "tip"
        bars = [
            bar.bounding_box()["width"] / row.bounding_box()["width"]
            for row in page.locator("#tip li").all()
            for bar in row.locator("i").all()
        ]
        assert bars == pytest.approx([0.35, 0.30, 0.175], abs=0.01)
        page.mouse.move(2, 2)
        page.wait_for_selector("#tip", state="hidden")

        spans.nth(0).focus()
        assert tip(page)[0] == "90.0 %"
        for key, place in {"ArrowRight": 1, "End": len(words) - 1, "Home": 0}.items():
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.textContent") == words[place]
            assert tip(page)[0] == f"{100 * page_server.probability(place):.1f} %"
        page.keyboard.press("ArrowDown")
        line = page.evaluate("document.activeElement.getBoundingClientRect().top")
        assert line > spans.nth(0).bounding_box()["y"] + 4
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")
        assert page.locator('.answer > .text .token[tabindex="0"]').count() == 1

        emoji = spans.nth(words.index(" 🙂"))
        emoji.hover()
        assert page.locator("#tip .explained").count() == 2
        page.click(".thought summary")
        page.locator(".thought .token").first.hover()
        assert tip(page)[0] == "90.0 %"
        assert page.logged == []


def test_a_tap_shows_a_token_and_a_phones_enter_is_a_new_line(opened):
    script = Script()
    with listening(script.app) as address:
        page = opened(address, width=390, has_touch=True, is_mobile=True)
        page.wait_for_selector("#model option", state="attached")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        assert page.input_value("#prompt") == "hello\n" and script.bodies == []
        page.tap("#send")
        page.wait_for_selector("#send:not([hidden])")
        page.locator(".answer > .text .token").nth(1).tap()
        assert tip(page)[0] == "60.0 %"
        page.tap(".said")
        page.wait_for_selector("#tip", state="hidden")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hostile_answer_is_text_also_after_a_reload(opened, width):
    """Row 70 of the cases: nothing runs, nothing is fetched from elsewhere, nothing is sent by itself."""
    script = Script()
    with listening(script.app) as address:
        page = opened(address, path="/?q=hostile&prompt=hostile#hostile", width=width)
        page.wait_for_selector("#model option", state="attached")
        time.sleep(0.3)
        assert script.bodies == [] and page.input_value("#prompt") == ""
        page.select_option("#beside", HOSTILE_NAME)
        ask(page, "hostile <i>think</i> call")
        for _ in range(2):
            assert texts(page) == [HOSTILE, HOSTILE]
            assert page.locator(".said").text_content() == "Youhostile <i>think</i> call"
            assert page.locator(".answer h3").all_text_contents() == [BASE, HOSTILE_NAME]
            assert page.locator(".calls pre").all_text_contents() == ['weather({"city": "Bern"})'] * 2
            assert page.locator("#turns :is(img, script, a, b, i, iframe)").count() == 0
            spans = page.locator(".answer > .text .token")
            spans.first.hover()
            assert page.locator("#tip :is(img, script, a)").count() == 0
            assert page.evaluate("window.broken === undefined")
            page.reload()
            page.wait_for_selector(".answer")
        assert page.input_value("#beside") == HOSTILE_NAME
        assert all(url.startswith(address) for url in page.asked)
        assert len(script.bodies) == 2 and page.logged == []
        spans.first.hover()
        assert tip(page)[0] == "90.0 %"


def test_inline_scripts_styles_and_foreign_addresses_are_blocked(opened):
    """The policy holds even if the page's own code were wrong."""
    with listening(Script().app) as address:
        page = opened(address)
        errors = pytest.importorskip("playwright.sync_api")
        with pytest.raises(errors.Error, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<img src=x>'")
        blocked = page.evaluate(
            "async () => { try { await fetch('https://evil.example/'); return false } catch { return true } }"
        )
        assert blocked and any("connect-src" in line for line in page.logged)


def test_refusals_and_broken_streams_are_told_and_the_next_question_is_answered(opened):
    with listening(Script().app) as address:
        page = opened(address)
        told = {
            "refuse": "temperature: expected 0 to 2, got <b>3</b>",
            "busy": "The queue is full. Try again in 7 s.",
            "fail": "The engine failed.",
            "drop": "The connection ended in the middle of the answer.",
            "break": "The connection ended in the middle of the answer.",
        }
        for said, sentence in told.items():
            ask(page, said)
            assert page.locator(".error:visible").last.text_content() == sentence
        assert texts(page)[2] == texts(page)[3] == "".join(page_server.words(TEXTS[BASE])[:3])
        ask(page, "hello")
        assert texts(page)[-1] == TEXTS[BASE]


def test_a_cut_answer_goes_on_from_its_very_text(opened):
    script = Script()
    with listening(script.app) as address:
        page = opened(address)
        ask(page, "think to the limit")
        cut = "A learning rate decides how far"
        assert texts(page) == [cut]
        assert page.locator(".figures").text_content().endswith("cut at the limit")
        page.click(".go-on")
        page.wait_for_selector("#send:not([hidden])")
        assert texts(page) == [TEXTS[BASE]] and page.locator(".go-on:visible").count() == 0
        assert page.evaluate("document.activeElement.id") == "prompt"
        first, second = script.bodies
        begun = {"role": "assistant", "content": cut, "reasoning_content": THOUGHT}
        assert second == {**first, "messages": [*first["messages"], begun], "continue_final_message": True}
        assert page.locator(".figures").text_content().startswith(f"{len(page_server.words(TEXTS[BASE])) + 2} tokens")
        assert page.logged == []


def test_an_answer_that_came_while_the_page_was_loaded_again_is_kept_as_stopped(opened):
    script = Script()
    with listening(script.app) as address:
        page = opened(address)
        ask(page, "plain")
        assert texts(page) == [TEXTS[BASE]] and page.locator(".token").count() == 0
        ask(page, "a long one", wait=False)
        page.locator(".turn:last-child .text .token").nth(9).wait_for()
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        whole, part = texts(page)
        assert whole == TEXTS[BASE] and (TEXTS[BASE] * 200).startswith(part) and len(part) > 20
        assert page.locator(".running").count() == 0 and page.is_visible("#send")
        assert page.locator(".error:visible").count() == 0
        assert page.locator(".figures").last.text_content().endswith("stopped")
        assert page.locator(".go-on:visible").count() == 1 and len(script.bodies) == 2


def test_a_wrong_setting_is_told_at_its_field_before_anything_is_sent(opened):
    script = Script()
    with listening(script.app) as address:
        page = opened(address, width=390)
        page.wait_for_selector("#model option", state="attached")
        page.click("#open-settings")
        page.fill("#field-top_p", "7")
        page.keyboard.press("Escape")
        assert page.is_hidden("#settings")
        ask(page, "hello", wait=False)
        page.wait_for_selector("#settings:not([hidden])")
        assert page.locator("#notice").text_content() == "Top p: expected a number from 0 to 1."
        assert page.evaluate("document.activeElement.id") == "field-top_p" and script.bodies == []
        page.fill("#field-top_p", "")
        page.keyboard.press("Escape")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".answer footer:not([hidden])")
        assert "top_p" not in script.bodies[0] and page.is_hidden("#notice")


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(opened):
    script = Script(key=KEY)
    with listening(script.app) as address:
        page = opened(address)
        for given, reason in (("wrong", "It was set"), (KEY, "That is not the server's key.")):
            page.wait_for_selector("#key-dialog[open]")
            assert page.locator("#key-reason").text_content().startswith(reason)
            page.fill("#key", given)
            page.press("#key", "Enter")
        page.wait_for_selector("#model option", state="attached")
        ask(page, "hello")
        assert texts(page) == [TEXTS[BASE]]
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        assert page.is_hidden("#key-dialog")
        assert page.evaluate("JSON.stringify(localStorage)").find(KEY) < 0
        assert not any(KEY in url for url in page.asked)
        assert page.context.cookies() == []
        other = page.context.new_page()
        other.goto(address)
        other.wait_for_selector("#key-dialog[open]")
        other.click("#key-cancel")
        other.wait_for_selector("#notice:not([hidden])")
        assert other.locator("#notice").text_content().startswith("The server asks for its key.")


def test_curves_grow_with_the_run(opened, tmp_path):
    rows = [{"step": 0, "event": "started", "message": "<b>started</b>"}]
    rows += [{"step": n, "loss": 3 / n, "learning_rate": 1e-4, "tokens_per_second": 9e3} for n in range(1, 301)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with listening(Script(run=tmp_path).app) as address:
        page = opened(address)
        page.click("#tab-run")
        page.wait_for_selector(".plot path")
        facts = dict(zip(page.locator("dt").all_text_contents(), page.locator("dd").all_text_contents(), strict=True))
        assert facts == {"Step": "300", "Loss": "0.0100", "Learning rate": "1e−4", "Tokens/s": "9,000"}
        assert page.locator(".pill").text_content() == "at work"
        assert page.locator(".events li").all_text_contents() == ["step 0<b>started</b>"]
        plot = page.locator(".plot").first
        plot.focus()
        page.keyboard.press("Home")
        assert plot.get_attribute("aria-valuetext") == "step 1 · loss 3"
        page.keyboard.press("ArrowRight")
        assert page.locator("output").first.text_content() == "step 2 · loss 1.5"
        with open(file, "a") as stream:
            stream.write('{"step": 301, "loss": 0.5}\n{"step": 301, "eval_loss": 0.25}\n')
            stream.write('{"step": 301, "event": "finished", "message": "done"}\n')
        page.locator(".pill", has_text="finished").wait_for()
        assert page.locator("dd").first.text_content() == "301"
        page.keyboard.press("End")
        assert plot.get_attribute("aria-valuetext") == "step 301 · loss 0.5 · evaluation 0.25"
        page.reload()
        page.wait_for_selector("#run .plot path")
        assert page.logged == []


def test_the_server_itself_is_talked_to(opened):
    """A tiny model answers: its text, its probabilities; what is stopped gives its row back."""
    key = "a key of sixteen".replace(" ", "-")
    with serving.served(key=key) as running:
        page = opened(running.url)
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.wait_for_selector("#model option", state="attached")
        page.fill("#field-temperature", "0")
        page.fill("#field-max_tokens", "12")
        ask(page, "héllo 👍")
        [[expected]] = answers(
            serving.model(),
            [[{"role": "user", "content": "héllo 👍"}]],
            GenerationOptions(max_new_tokens=12, top_logprobs=5),
            reading=Reading(special_tokens="text"),
        )
        assert texts(page) == [expected.text]
        assert page.locator(".figures").text_content().startswith("12 tokens · ")
        spans = page.locator(".answer > .text .token")
        spans.first.hover()
        rows = tip(page)[1]
        shares = [100 * math.exp(value) for _, value in expected.likeliest[0]]
        assert [float(row[1].split()[0]) for row in rows[:5]] == pytest.approx(shares, abs=0.06)
        page.fill("#field-max_tokens", "200")
        page.click("#settings summary")
        page.fill("#field-stop", "never")
        ask(page, "a long one", wait=False)
        spans.nth(14).wait_for()
        page.click("#stop")
        serving.until(lambda: running.worker.open == 0)
        page.click(".retry:visible")
        page.wait_for_selector("#send:not([hidden])", timeout=60_000)
        assert len(texts(page)) == 2
        assert [line for line in page.logged if "401" not in line] == []  # a browser notes that it was refused
