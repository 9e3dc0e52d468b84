// Draws one dashboard with Grafana's own React components (Apache-2.0 packages), without a Grafana server.
// Query parameters: prometheus (its address), from and to (seconds since 1970), step, rate (the rate interval), theme.
// Every panel is an element with data-panel (its title), data-type, and data-state: loading, done, empty or error.
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  FieldConfigOptionsRegistry, FieldType, LoadingState, applyFieldOverrides, createDataFrame, createTheme, dateTime,
  getDisplayProcessor, getFieldDisplayName, reduceField, ThemeContext,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import { initPluginTranslations } from '@grafana/i18n';

const WIDTH = 1280;
const COLUMN = WIDTH / 24;
const LINE = 36;
const TOP = 48;

const given = new URLSearchParams(location.search);
const prometheus = given.get('prometheus');
const [from, to] = [Number(given.get('from')), Number(given.get('to'))];
const theme = createTheme({ colors: { mode: given.get('theme') || 'dark' } });
const [start, end] = [dateTime(from * 1000), dateTime(to * 1000)];
const timeRange = { from: start, to: end, raw: { from: start, to: end } };
const builtIn = { __rate_interval: given.get('rate'), __range: `${Math.round(to - from)}s` };

const substitute = (text) => text.replace(/\$(?:\{(\w+)\}|(\w+))/g, (_, a, b) => builtIn[a || b] ?? '.*');
const legend = (format, labels) => format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');

async function query(target) {
  const asked = new URLSearchParams({ query: substitute(target.expr), start: from, end: to, step: given.get('step') });
  const answer = await (await fetch(`${prometheus}/api/v1/query_range?${asked}`)).json();
  if (answer.status !== 'success') throw new Error(answer.error);
  return answer.data.result.map((series) =>
    createDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: series.values.map(([at]) => at * 1000), config: { interval: 1000 } },
        {
          name: 'Value',
          type: FieldType.number,
          labels: series.metric,
          values: series.values.map(([, value]) => (Number.isFinite(Number(value)) ? Number(value) : null)),
          config: { displayNameFromDS: legend(target.legendFormat, series.metric) },
        },
      ],
    })
  );
}

const OPTIONS = ['unit', 'decimals', 'min', 'max', 'displayName', 'noValue', 'thresholds', 'color', 'mappings', 'links'];
const registry = new FieldConfigOptionsRegistry(() =>
  OPTIONS.map((id) => ({
    id, path: id, name: id, process: (value) => value, shouldApply: () => true,
    override: (value) => value,
  }))
);

function prepared(panel, frames) {
  const { defaults, overrides } = panel.fieldConfig;
  const colours = Object.fromEntries(overrides.map((one) => [one.matcher.options, one.properties[0].value]));
  const data = applyFieldOverrides({
    data: frames, fieldConfig: { defaults, overrides: [] }, replaceVariables: (text) => text, theme, timeZone: 'utc',
    fieldConfigRegistry: registry,
  });
  data.forEach((frame, index) =>
    frame.fields.forEach((field) => {
      field.state = { ...field.state, seriesIndex: index, displayName: null };
      if (field.type === FieldType.number) {
        const colour = colours[field.config.displayNameFromDS];
        field.config = { ...field.config, custom: { ...defaults.custom }, color: colour || defaults.color };
      }
      field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    })
  );
  return data;
}

function Body({ panel, frames, width, height }) {
  if (panel.type === 'timeseries') {
    return (
      <TimeSeries
        frames={frames} structureRev={1} width={width} height={height} timeRange={timeRange} timeZone="utc"
        legend={panel.options.legend}
      >
        {() => null}
      </TimeSeries>
    );
  }
  const columns = Math.min(frames.length, Math.max(1, Math.floor(width / 90)));
  const rows = Math.ceil(frames.length / columns);
  return (
    <div style={{ display: 'flex', flexWrap: 'wrap' }}>
      {frames.map((frame, index) => {
        const field = frame.fields[1];
        const value = reduceField({ field, reducers: ['lastNotNull'] }).lastNotNull;
        const shown = { ...field.display(value), title: frames.length > 1 ? getFieldDisplayName(field, frame) : '' };
        return (
          <BigValue
            key={index} width={width / columns - 2} height={height / rows - 2} theme={theme} colorMode="value"
            graphMode="none" justifyMode="auto" value={shown}
          />
        );
      })}
    </div>
  );
}

function Panel({ panel, width, height }) {
  const [state, setState] = React.useState({ name: 'loading', frames: [] });
  React.useEffect(() => {
    Promise.all(panel.targets.map(query))
      .then((all) => {
        const frames = prepared(panel, all.flat().filter((frame) => frame.fields[1].values.some((v) => v !== null)));
        setState({ name: frames.length ? 'done' : 'empty', frames });
      })
      .catch((error) => setState({ name: 'error', frames: [], text: String(error) }));
  }, []);
  return (
    <div data-panel={panel.title} data-type={panel.type} data-state={state.name}>
      <PanelChrome
        title={panel.title} description={panel.description} width={width} height={height}
        loadingState={state.name === 'loading' ? LoadingState.Loading : LoadingState.Done} statusMessage={state.text}
      >
        {(innerWidth, innerHeight) =>
          state.frames.length ? (
            <Body panel={panel} frames={state.frames} width={innerWidth} height={innerHeight} />
          ) : (
            <div>{state.text || (state.name === 'empty' ? panel.fieldConfig.defaults.noValue || 'No data' : '')}</div>
          )
        }
      </PanelChrome>
    </div>
  );
}

function Board({ dashboard }) {
  const lines = Math.max(...dashboard.panels.map((panel) => panel.gridPos.y + panel.gridPos.h));
  const style = {
    position: 'relative', width: WIDTH, height: TOP + lines * LINE + 8,
    background: theme.colors.background.canvas, color: theme.colors.text.primary,
  };
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={style}>
        <h3 style={{ padding: 12, margin: 0 }}>{dashboard.title}</h3>
        {dashboard.panels.map((panel) => {
          const { x, y, w, h } = panel.gridPos;
          const [width, height] = [w * COLUMN - 8, h * LINE - 8];
          return (
            <div key={panel.id} style={{ position: 'absolute', left: x * COLUMN + 4, top: TOP + y * LINE, width, height }}>
              {panel.type === 'row' ? (
                <h5 style={{ margin: '8px 4px' }}>{panel.title}</h5>
              ) : (
                <Panel panel={panel} width={width} height={height} />
              )}
            </div>
          );
        })}
      </div>
    </ThemeContext.Provider>
  );
}

async function main() {
  await initPluginTranslations('grafana');
  const dashboard = await (await fetch('/dashboard.json')).json();
  createRoot(document.getElementById('root')).render(<Board dashboard={dashboard} />);
}
main();
