"""The application in a real browser: every tab, by pointer and keyboard, wide and narrow, light and dark."""

import shutil

import pytest
from space_runs import HOSTILE, adapter_run, image_run, link_run

pytest.importorskip("gradio")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_every_kind_of_run_has_its_tabs(tmp_path):
    from aswa_hf.space import build_app

    def tabs(app):
        return [block.label for block in app.blocks.values() if type(block).__name__ == "Tab"]

    assert tabs(build_app(link_run(tmp_path / "links"))) == ["Ask", "Hops", "Trajectory", "Strategies", "Card"]
    assert tabs(build_app(image_run(tmp_path / "images"))) == ["Classify", "Trajectory", "Strategies", "Card"]
    pytest.importorskip("peft")
    assert tabs(build_app(adapter_run(tmp_path / "texts"))) == ["Write", "Trajectory", "Strategies", "Card"]


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of three kinds of runs."""
    folder = tmp_path_factory.mktemp("runs")
    made = {"links": link_run, "images": image_run}
    try:
        import peft  # noqa: F401

        made["texts"] = adapter_run
    except ImportError:
        pass
    return {name: make(folder / name) for name, make in made.items()}


@pytest.fixture(scope="module")
def addresses(runs):
    """Applications of three kinds of runs, each at its port."""
    from aswa_hf.space import build_app
    from aswa_hf.space.app import launch_options

    apps, found = [], {}
    for name, run in runs.items():
        app = build_app(run)
        options = launch_options() | {"prevent_thread_lock": True, "quiet": True, "server_name": "127.0.0.1"}
        _, found[name], _ = app.launch(**options)
        apps.append(app)
    yield found
    for app in apps:
        app.close()


@pytest.fixture
def visit(chromium, addresses):
    """Opens a page; at the end there must be no error in its console and no request to elsewhere."""
    problems, pages = [], []

    def opened(name, width=1280, scheme="light"):
        if name not in addresses:
            pytest.skip(f"there is no application of {name} here")
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(30_000)
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
        page.on("request", lambda r: None if _inside(r.url) else problems.append(r.url))
        page.goto(addresses[name])
        page.get_by_role("tab").first.wait_for()
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert problems == []


def _inside(url):
    return url.startswith(("http://127.0.0.1:", "http://localhost:", "data:", "blob:"))


def open_tab(page, name):
    tab = page.get_by_role("tab", name=name, exact=True)
    if not tab.count() or not tab.first.is_visible():
        page.get_by_role("button", name="More tabs").click()
        page.locator(".overflow-dropdown").get_by_role("button", name=name, exact=True).click()
    else:
        tab.first.click()
    page.wait_for_timeout(300)


def choose(page, place, text):
    """Types a part of a label, and takes the label from those that fit."""
    box = page.locator(f"{place} :is(input, textarea)").first
    box.fill("")
    box.press_sequentially(text[:8], delay=30)
    page.locator(f"{place}-offers").get_by_text(text, exact=True).click()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_links_are_asked_and_every_tab_fits_the_screen(visit, width, scheme):
    page = visit("links", width, scheme)
    answers = page.locator("#ask-answers")
    answers.get_by_role("row").nth(5).wait_for()
    choose(page, "#ask-entity", "a")
    page.wait_for_function("document.querySelector('#ask-answers caption').textContent.startsWith('a ')")
    page.get_by_text("the head: ? —relation→ entity").click()
    page.wait_for_function("document.querySelector('#ask-answers caption').textContent.startsWith('? ')")
    answers.get_by_text("known (train)").first.wait_for()
    assert answers.get_by_role("meter").first.get_attribute("aria-label").startswith("probability of")
    for name in ("Hops", "Trajectory", "Strategies", "Card"):
        open_tab(page, name)
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0, name
    dark = page.evaluate("document.body.classList.contains('dark')")
    assert dark == (scheme == "dark")


@pytest.mark.slow
def test_a_question_of_several_hops_is_put_together_by_clicking(visit):
    page = visit("links")
    open_tab(page, "Hops")
    page.locator("#hops-ask").click()
    page.locator("#hops-answers").get_by_text("not complete").wait_for()
    page.locator("#hops-start").click()
    page.wait_for_function("document.querySelector('#hops-text textarea').value.length > 0")
    for _ in range(2):
        before = page.locator("#hops-text textarea").input_value()
        page.locator("#hops-follow").click()
        page.wait_for_function("before => document.querySelector('#hops-text textarea').value !== before", arg=before)
    page.locator("#hops-ask").click()
    page.locator("#hops-answers ol.chain").first.wait_for()
    assert page.locator("#hops-answers ol.chain").first.locator("li").count() == 2


@pytest.mark.slow
def test_clicks_in_quick_succession_are_all_counted_in_their_order(visit):
    path = "b —knows→ ?"
    for names, question in (
        (["start", "follow", "follow", "follow"], f"{path} —knows→ ? —knows→ ?"),
        (
            ["follow", "start", "follow", "follow", "start", "follow", "together", "follow", "undo"],
            f"( {path} —knows→ ? and {path} )",
        ),
        (["start", "follow", "undo", "undo", "start", "follow", "clear", "start", "follow", "ask"], path),
    ):
        page = visit("links")
        open_tab(page, "Hops")
        page.evaluate("names => names.forEach(name => document.getElementById(`hops-${name}`).click())", names)
        page.wait_for_function("text => document.querySelector('#hops-text textarea').value === text", arg=question)
        if names[-1] == "ask":
            page.wait_for_function(
                "text => document.querySelector('#hops-answers caption')?.textContent.startsWith(text)", arg=question
            )
            assert page.locator("#hops-message .error").count() == 0


@pytest.mark.slow
def test_a_label_that_is_chosen_is_where_the_next_click_starts(visit):
    page = visit("links")
    open_tab(page, "Hops")
    page.locator("#hops-entity :is(input, textarea)").first.fill("")
    page.wait_for_function("document.querySelectorAll('#hops-entity-offers input').length === 5")
    page.locator("#hops-entity-offers").get_by_text("c", exact=True).click()
    page.wait_for_function("document.querySelector('#hops-entity :is(input, textarea)').value === 'c'")
    page.evaluate("document.getElementById('hops-start').click()")
    page.wait_for_function("document.querySelector('#hops-text textarea').value === 'c'")


@pytest.mark.slow
def test_pasted_text_is_completed_and_a_chosen_label_leaves_the_list_as_it_is(visit):
    page = visit("links")
    page.locator("#ask-answers").get_by_role("row").nth(5).wait_for()
    box = page.locator("#ask-entity :is(input, textarea)").first
    box.fill("")
    page.locator("#ask-entity-offers").get_by_text("<img").wait_for()
    box.focus()
    page.evaluate("document.execCommand('insertText', false, 'long lab')")  # what a paste does
    offers = page.locator("#ask-entity-offers input")
    page.wait_for_function("document.querySelectorAll('#ask-entity-offers input').length === 1")
    box.fill("")
    page.wait_for_function("document.querySelectorAll('#ask-entity-offers input').length === 5")
    offers.nth(0).check()
    page.keyboard.press("ArrowDown")  # from the first label to the second: both must still be there
    page.wait_for_function("document.querySelector('#ask-answers caption').textContent.startsWith('b ')")
    assert offers.count() == 5


@pytest.mark.slow
def test_a_model_that_is_replaced_is_asked_on_without_an_error(visit, runs):
    import torch

    from aswa_hf.kge import LinkPredictor

    page = visit("links")
    answers = page.locator("#ask-answers")
    answers.get_by_role("row").nth(5).wait_for()
    weights = runs["links"] / "model.safetensors"
    complete = weights.read_bytes()
    before = answers.inner_text()
    try:
        weights.write_bytes(complete[:50])  # half-written
        page.get_by_text("the head: ? —relation→ entity").click()
        page.wait_for_function("document.querySelector('#ask-answers caption').textContent.startsWith('? ')")
        assert answers.get_by_role("meter").count() == 5
        weights.write_bytes(complete)
        model = LinkPredictor.from_pretrained(runs["links"]).model
        with torch.no_grad():
            model.entity_embeddings.weight.mul_(-2)
        model.save_pretrained(runs["links"])
        page.get_by_text("the tail: entity —relation→ ?").click()
        page.wait_for_function("!document.querySelector('#ask-answers caption').textContent.startsWith('? ')")
        assert answers.inner_text() != before
    finally:
        weights.write_bytes(complete)


@pytest.mark.slow
def test_hostile_text_stays_text_and_bad_questions_are_explained(visit):
    page = visit("links")
    page.locator("#ask-answers").get_by_role("row").nth(5).wait_for()
    choose(page, "#ask-entity", HOSTILE)
    page.wait_for_function("document.querySelector('#ask-answers caption').textContent.startsWith('<img')")
    assert page.locator("#ask-answers img, #ask-picture img").count() == 0
    box = page.locator("#ask-entity :is(input, textarea)").first
    for text, message in (("x" * 10_000, "10,000 characters"), ("", "Choose an entity first")):
        box.fill(text)
        box.press("Enter")
        page.locator("#ask-answers").get_by_text(message).wait_for()


@pytest.mark.slow
def test_the_slider_shows_the_ensemble_of_any_decision_point_by_keyboard(visit):
    page = visit("links")
    open_tab(page, "Trajectory")
    slider = page.get_by_role("slider").locator("visible=true").first
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    page.locator("#point-text").get_by_text("Epoch 4: soft").wait_for()
    shown = page.locator("#trajectory .wide-only")
    assert shown.locator("rect.alpha").count() == 3
    band = shown.locator(".point").nth(1)
    band.locator(".band").hover()
    assert band.locator(".tip").evaluate("node => getComputedStyle(node).visibility") == "visible"


@pytest.mark.slow
def test_everything_is_reached_by_keyboard_and_has_a_name(visit):
    page = visit("links")
    page.locator("#ask-answers").get_by_role("row").nth(5).wait_for()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, [role=tab], [role=slider]')]
        .filter(node => node.offsetParent !== null)
        .filter(node => !(node.getAttribute('aria-label') || node.innerText || node.title
            || (node.labels && node.labels.length) || node.getAttribute('aria-labelledby')))
        .map(node => node.outerHTML.slice(0, 200))"""
    )
    assert unnamed == []
    seen = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.closest('[id]')?.id || document.activeElement.tagName"))
    assert {"ask-entity", "ask-relation", "ask-direction", "ask-button"} <= {
        name for name in seen for name in (name, *([] if not name else [name.rsplit(":", 1)[0]]))
    }


@pytest.mark.slow
def test_a_picture_is_classified(visit, tmp_path):
    import numpy as np
    import PIL.Image

    path = tmp_path / "picture.png"
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(path)
    for width, scheme in ((1280, "dark"), (390, "light")):
        page = visit("images", width, scheme)
        page.locator("#image-input input[type=file]").set_input_files(str(path))
        page.locator("#classes").get_by_role("meter").first.wait_for()
        assert page.locator("#classes").get_by_role("meter").count() == 10


@pytest.mark.slow
def test_two_adapters_continue_a_text_side_by_side(visit):
    page = visit("texts")
    page.locator("#prompt textarea").fill("the cat sat")
    page.locator("#write-button").click()
    page.locator("#texts").get_by_text("Averaged weights").wait_for()
    assert page.locator("#texts .output").count() == 2


@pytest.mark.slow
def test_two_users_at_once_do_not_mix(visit):
    one, other = visit("links"), visit("links")
    for page in (one, other):
        open_tab(page, "Hops")
    one.locator("#hops-start").click()
    one.wait_for_function("document.querySelector('#hops-text textarea').value.startsWith('b')")
    assert other.locator("#hops-text textarea").input_value() == "Nothing chosen yet."
