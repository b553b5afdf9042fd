"use strict";
(async () => {
  const root = document.documentElement;
  const isDark = () =>
    (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const element = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const charts = element("charts") ? JSON.parse(element("charts").textContent) : [];
  const plots = charts.map((_, index) => element(`chart-${index}`));
  const touch = matchMedia("(pointer: coarse)").matches; // a finger that drags scrolls the page
  const isShown = (trace) => trace.visible ?? true; // or "legendonly"
  let drawn = false;

  const traces = (chart, plot) => chart.traces.map((trace, index) => {
    const visible = isShown(plot.data?.[index] ?? {}); // hidden lines and a zoom outlive a change of colours
    const own = colour(trace.meta);
    const edge = { color: own, ...trace.marker?.line };
    const marker = trace.marker && { ...trace.marker, color: own, line: edge };
    return { type: "scatter", visible, ...trace, line: { ...trace.line, color: own }, ...(marker && { marker }) };
  });

  const layout = (chart, plot) => {
    const grid = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line") };
    const pointer = { spikecolor: colour("soft"), spikedash: "solid", spikethickness: -2 }; // 1 pixel, without an edge
    const few = chart.layout.xaxis?.range?.[1] < 6 && { dtick: 1 }; // no ticks between steps
    const steps = { title: { text: "step", standoff: 8 }, tickformat: ",d", ...few, unifiedhovertitle: { text: "step %{x:,d}" } };
    const axes = Object.entries(chart.layout).filter(([name]) => name.includes("axis")).map(([name, axis]) => {
      const { range, autorange } = plot.layout?.[name] ?? {};
      const zoomed = { ...(range && { range }), ...(autorange !== undefined && { autorange }) };
      const common = name === "xaxis" ? { ...pointer, ...steps } : { automargin: true };
      return [name, { ...grid, ...common, ...axis, ...zoomed }];
    });
    return {
      ...chart.layout,
      ...Object.fromEntries(axes),
      autosize: true,
      dragmode: touch ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("soft") },
      hoverlabel: { namelength: -1, bgcolor: colour("back"), bordercolor: colour("line"), font: { color: colour("ink") } },
      hovermode: "x unified",
      legend: {
        orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colour("ink") },
        title: { text: " ", side: "top" }, // the row of the caption and the buttons
      },
      margin: { l: 48, r: 16, t: 28, b: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
    };
  };

  const buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
  const config = {
    displaylogo: false, doubleClick: "reset", modeBarButtons: [buttons], responsive: true, showTips: false,
  };
  const draw = () => Promise.all(charts.map((chart, index) =>
    Plotly.react(plots[index], traces(chart, plots[index]), layout(chart, plots[index]), config)));

  /** Zoom all plots to the steps of one of them, or all back, and hide and show what is of one group in all. */
  const link = (plot) => {
    plot.on("plotly_restyle", () => {
      const groups = new Map(plot.data.filter((trace) => trace.legendgroup).map((t) => [t.legendgroup, isShown(t)]));
      for (const other of plots)
        other.data.forEach((trace, index) => {
          const shown = groups.get(trace.legendgroup) ?? isShown(trace);
          if (shown !== isShown(trace)) Plotly.restyle(other, { visible: shown }, [index]);
        });
    });
    plot.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((key) => key.startsWith("xaxis."))) return;
      const range = plot.layout.xaxis.range;
      for (const other of plots) // a plot that shows them already ends the chain
        if (String(other.layout.xaxis.range) !== String(range)) Plotly.relayout(other, { "xaxis.range": [...range] });
    });
    plot.on("plotly_doubleclick", () => charts.forEach((chart, index) => {
      const back = { "xaxis.range": [...chart.layout.xaxis.range] };
      if (chart.layout.yaxis.range) back["yaxis.range"] = [...chart.layout.yaxis.range];
      else back["yaxis.autorange"] = true;
      Plotly.relayout(plots[index], back);
    }));
  };

  const recolour = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    element("theme").textContent = isDark() ? "Light" : "Dark";
    return drawn ? draw() : undefined;
  };
  element("theme").hidden = false;
  element("theme").addEventListener("click", () => recolour(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => recolour(root.dataset.theme));
  recolour(root.dataset.theme);
  if (!charts.length) return;

  const packed = await (await fetch(`data:;base64,${element("library").textContent.trim()}`)).blob();
  const script = document.createElement("script");
  script.textContent = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
  await draw();
  drawn = true;
  plots.forEach(link);

  let before; // paper is white and narrower than most screens
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.classList.add("printed");
    recolour("light");
    plots.forEach((plot) => Plotly.Plots.resize(plot));
  });
  addEventListener("afterprint", async () => {
    root.classList.remove("printed");
    await Promise.all(plots.map((plot) => Plotly.Plots.resize(plot)));
    await recolour(before);
  });
})();
