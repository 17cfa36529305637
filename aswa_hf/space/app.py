"""The application in gradio: the only module that imports it. What it shows is computed by the others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is sent anywhere

import gradio as gr

from aswa_hf.space import render
from aswa_hf.space.images import Images
from aswa_hf.space.links import Clicks, Links, Question, question_text
from aswa_hf.space.source import IMAGES, LINKS, TEXT, Source, open_source
from aswa_hf.space.text import MAX_TOKENS, Texts
from aswa_hf.style import DARK, FONT, LIGHT, MONOSPACE

EXPECTED = (ValueError, TypeError, OSError)
OFFERS = 8  # labels shown below a box
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def theme() -> Any:
    """Returns the colors and fonts of the application: the reader's own fonts, nothing is loaded."""
    fonts = [name.strip(' "') for name in FONT.split(",")]
    mono = [name.strip(' "') for name in MONOSPACE.split(",")]
    base = gr.themes.Base(primary_hue="sky", secondary_hue="sky", neutral_hue="slate", font=fonts, font_mono=mono)
    return base.set(  # white text on them can be read
        button_primary_background_fill=LIGHT["ours"],
        button_primary_background_fill_hover=LIGHT["win"],
        button_primary_background_fill_dark=DARK["win"],
        button_primary_background_fill_hover_dark=LIGHT["ours"],
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#ffffff",
        block_info_text_color=LIGHT["soft-ink"],
        block_info_text_color_dark=DARK["soft-ink"],
        block_label_text_color=LIGHT["soft-ink"],
        block_label_text_color_dark=DARK["soft-ink"],
        checkbox_border_color=LIGHT["soft-ink"],
        checkbox_border_color_dark=DARK["soft-ink"],
        checkbox_background_color_selected=LIGHT["ours"],
        checkbox_background_color_selected_dark=DARK["win"],
        color_accent=LIGHT["ours"],
        slider_color=LIGHT["ours"],
        slider_color_dark=DARK["ours"],
    )


def launch_options() -> dict[str, Any]:
    """Returns what every start of the application has in common."""
    return {"theme": theme(), "css": render.CSS, "footer_links": [], "ssr_mode": False, "show_error": True}


def serve(run: str | Path, announce: Callable[[str], None] | None = None, **options: Any) -> None:
    """Starts the application and waits until it is stopped; with `announce`, gradio does not print the address."""
    app = build_app(run)
    options = {**launch_options(), **options}
    if announce is None:
        app.launch(**options)
        return
    _, address, _ = app.launch(**options, quiet=True, prevent_thread_lock=True)
    announce(address)
    app.block_thread()


def build_app(run: str | Path) -> gr.Blocks:
    """Returns the application of a run."""
    source = open_source(run)
    with gr.Blocks(title=f"{source.title} · ASWA", analytics_enabled=False) as app:
        gr.Markdown(f"# {_markdown(source.title)}\n{_summary(source)}")
        with gr.Tabs():
            if source.kind == LINKS:
                links = Links(source)
                with gr.Tab("Ask"):
                    _ask(links)
                with gr.Tab("Hops"):
                    _hops(links)
            if source.kind == IMAGES:
                with gr.Tab("Classify"):
                    _classify(Images(source))
            if source.kind == TEXT:
                with gr.Tab("Write"):
                    _write(Texts(source))
            with gr.Tab("Trajectory"):
                _history(source)
            with gr.Tab("Strategies"):
                gr.HTML(render.strategies(source))
            with gr.Tab("Card"):
                gr.Markdown(source.card(), elem_id="card")
    return app


def _markdown(text: str) -> str:
    """Text that stays text in Markdown."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#+-!|" else letter for letter in text[:200])


def _summary(source: Source) -> str:
    if source.main is None:
        return "A model without a history of its weights."
    trajectory = source.trajectories[source.main]
    decisions = [record.decision.value for record in trajectory]
    snapshots = trajectory[-1].members
    made = (
        f"{len(decisions)} decisions, {decisions.count('soft')} soft, {decisions.count('hard')} hard, "
        f"{decisions.count('reject')} rejected; {snapshots} snapshot{' is' if snapshots == 1 else 's are'} in"
    )
    if source.applied not in (None, source.main):
        return f"The weights of the strategy {_markdown(str(source.applied))}. {source.main} made {made} its average."
    name = "Adaptive Stochastic Weight Averaging" + (" over every step" if source.main == "dense-aswa" else "")
    return f"Weights chosen by {name}: {made} the final weights."


def _shown(compute: Callable[..., str], *arguments: Any) -> str:
    """Returns HTML; an error that readers can act on becomes a message."""
    try:
        return compute(*arguments)
    except EXPECTED as error:
        return render.error(error)


def _entity_box(links: Links, label: str, value: str, identifier: str) -> tuple[gr.Textbox, gr.Radio]:
    """A box for a label, and below it the labels that complete what is typed, to be chosen by click or keys."""
    # Not a dropdown whose choices change while somebody types: gradio 6.31 then fails in the browser.
    box = gr.Textbox(value, label=label, placeholder="Type a part of a label", max_lines=1, elem_id=identifier)
    offers = gr.Radio(
        links.complete(value, limit=OFFERS), value=value, label="Labels that fit", elem_id=f"{identifier}-offers"
    )

    def completed(text: str, chosen: str | None) -> Any:
        if text == chosen:  # the box was filled from the list, which stays as it is
            return gr.skip()
        fitting = links.complete(text, limit=OFFERS)
        return gr.update(choices=fitting, value=None, label="Labels that fit" if fitting else "No label contains this")

    # Not `input`, which does not happen when text is pasted.
    box.change(completed, [box, offers], offers, trigger_mode="always_last", queue=False, **QUIET)
    offers.input(None, offers, box, js="label => label", **QUIET)  # at once: an answer may come after the next choice
    return box, offers


def _relation_box(links: Links, label: str, value: str | None, identifier: str) -> gr.Dropdown:
    return gr.Dropdown(choices=links.relations, value=value, label=label, filterable=True, elem_id=identifier)


def _ask(links: Links) -> None:
    entity, relation = links.first
    with gr.Row():
        with gr.Column(min_width=280):
            entity_box, offers = _entity_box(links, "Entity", entity, "ask-entity")
            relation_box = _relation_box(links, "Relation", relation, "ask-relation")
            direction = gr.Radio(
                [("the tail: entity —relation→ ?", "tail"), ("the head: ? —relation→ entity", "head")],
                value="tail",
                label="What is asked",
                elem_id="ask-direction",
            )
            ask = gr.Button("Ask", variant="primary", elem_id="ask-button")
        with gr.Column(min_width=300, scale=2):
            answers = gr.HTML(elem_id="ask-answers")
    picture = gr.HTML(elem_id="ask-picture")

    def answer(entity: str | None, relation: str | None, direction: str) -> tuple[str, str]:
        def table() -> str:
            found = links.ask(entity, relation, direction)
            question = f"{entity} —{relation}→ ?" if direction == "tail" else f"? —{relation}→ {entity}"
            return render.answers(question, found, links.graph is not None)

        def neighbors() -> str:
            return render.neighborhood(str(entity).strip(), links.neighborhood(entity))

        shown = _shown(table)
        return shown, _shown(neighbors) if 'role="alert"' not in shown else ""

    inputs, outputs = [entity_box, relation_box, direction], [answers, picture]
    gr.on(
        [ask.click, entity_box.submit, direction.input, relation_box.input],
        answer,
        inputs,
        outputs,
        show_progress="hidden",
        api_name="ask",
    )
    offers.input(answer, [offers, relation_box, direction], outputs, **QUIET)
    answers.value, picture.value = answer(entity, relation, "tail")


def _hops(links: Links) -> None:
    entity, relation = links.first
    state = gr.State(Clicks())
    gr.Markdown("Start from an entity, follow relations from it, add more paths, and ask which entities they reach.")
    with gr.Row():
        with gr.Column(min_width=280):
            entity_box, _ = _entity_box(links, "Entity", entity, "hops-entity")
            start = gr.Button("Start a path here", elem_id="hops-start")
            relation_box = _relation_box(links, "Relation", relation, "hops-relation")
            backwards = gr.Checkbox(label="Follow it backwards", elem_id="hops-backwards")
            follow = gr.Button("Follow the relation", elem_id="hops-follow")
            join = gr.Radio(
                [("all paths (and)", "and"), ("any path (or)", "or")], value="and", label="An answer is reached by"
            )
            together = gr.Button("Continue from all paths together", elem_id="hops-together")
            with gr.Row():
                undo = gr.Button("Undo", min_width=80, elem_id="hops-undo")
                clear = gr.Button("Clear", min_width=80, elem_id="hops-clear")
            ask = gr.Button("Ask", variant="primary", elem_id="hops-ask")
        with gr.Column(min_width=300, scale=2):
            shown = gr.Textbox(question_text(Question()), label="The question", interactive=False, elem_id="hops-text")
            message = gr.HTML(elem_id="hops-message")
            answers = gr.HTML(elem_id="hops-answers")

    # Clicks are applied in the order of the numbers that the browser gives them: requests overtake each other. By
    # default a click is lost while the one before is pending.
    turn = gr.Number(visible=False)
    in_turn: dict[str, Any] = {
        **QUIET,
        "concurrency_id": "hops",
        "concurrency_limit": 1,
        "trigger_mode": "multiple",
        "js": "(...values) => [...values.slice(0, -1), (window.clicksOnHops = (window.clicksOnHops ?? 0) + 1)]",
    }

    def clicked(name: str, check: Callable[..., tuple[Any, ...]] = lambda *values: values) -> Callable[..., Any]:
        def act(clicks: Clicks, *values: Any) -> tuple[Clicks, str, str, Any]:
            *arguments, number = values
            number = clicks.next if number is None else int(number)
            try:
                clicks = clicks.add(number, name, *check(*arguments))
                question, problem = clicks.replay()
            except EXPECTED as error:
                question, problem = clicks.replay()[0], str(error)
            asked = clicks.asked(number)  # again, if a click arrives after the question that it belongs to
            found = gr.skip() if asked is None else _shown(answer, asked)
            return clicks, question_text(question), render.error(problem) if problem else "", found

        return act

    def answer(question: Question) -> str:
        return render.chains(question_text(question), links.chains(question))

    def entity_label(entity: Any) -> tuple[str]:
        return (links.check_label(entity, "entity"),)

    def hop(relation: Any, backwards: Any) -> tuple[str, bool]:
        return links.check_label(relation, "relation"), bool(backwards)

    changed = [state, shown, message, answers]
    start.click(clicked("start", entity_label), [state, entity_box, turn], changed, **in_turn)
    follow.click(clicked("follow", hop), [state, relation_box, backwards, turn], changed, **in_turn)
    join.change(clicked("join"), [state, join, turn], changed, **in_turn)
    for button, name in ((together, "together"), (undo, "undo"), (clear, "clear")):
        button.click(clicked(name), [state, turn], changed, **in_turn)
    ask.click(
        clicked("ask"), [state, turn], changed, **{**in_turn, "show_progress": "minimal", "show_progress_on": answers}
    )


def _classify(images: Images) -> None:
    with gr.Row():
        with gr.Column(min_width=280):
            picture = gr.Image(type="pil", label="A picture", sources=["upload", "clipboard"], elem_id="image-input")
            folder = Path(tempfile.mkdtemp(prefix="aswa-examples-"))
            examples = images.examples(folder)
            if examples:
                gr.Examples([[str(path)] for path in examples], [picture], label="Examples from the test data")
        with gr.Column(min_width=280):
            found = gr.HTML(render.piece('<p class="quiet">Drop a picture to see its classes.</p>'), elem_id="classes")

    def classify(picture: Any) -> str:
        if picture is None:
            return render.piece('<p class="quiet">Drop a picture to see its classes.</p>')
        return _shown(lambda: render.classes(images.classify(picture)))

    picture.change(classify, [picture], [found], show_progress="minimal", api_name="classify")


def _write(texts: Texts) -> None:
    prompt = gr.Textbox(label="A text to continue", lines=4, elem_id="prompt")
    length = gr.Slider(1, MAX_TOKENS, value=40, step=1, label="Number of new tokens")
    button = gr.Button("Continue", variant="primary", elem_id="write-button")
    found = gr.HTML(elem_id="texts")

    def write(prompt: str, length: float) -> str:
        return _shown(lambda: render.texts(texts.complete(prompt, int(length))))

    gr.on([button.click, prompt.submit], write, [prompt, length], [found], show_progress="minimal", api_name="write")


def _history(source: Source) -> None:
    if source.main is None:
        gr.HTML(render.history(source))
        return
    points = len(source.trajectories[source.main])
    plot = gr.HTML(render.history(source, points - 1), elem_id="trajectory")
    chosen = gr.Slider(
        1, max(points, 2), value=points, step=1, label="The ensemble as it was after decision point", elem_id="point"
    )
    text = gr.HTML(render.point(source, points - 1), elem_id="point-text")

    def show(number: float) -> tuple[str, str]:
        index = min(max(int(number or 1), 1), points) - 1
        return render.history(source, index), render.point(source, index)

    chosen.change(show, [chosen], [plot, text], trigger_mode="always_last", **QUIET)
