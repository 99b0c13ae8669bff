#include "base/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace fathom {

struct MetricsRegistry::Series {
  MetricLabels labels;
  std::unique_ptr<Counter> counter;
  std::unique_ptr<Gauge> gauge;
  std::unique_ptr<Histogram> histogram;
};

struct MetricsRegistry::Family {
  std::string name;
  std::string help;
  std::string type;
  std::vector<std::unique_ptr<Series>> series;
};

namespace {

std::string EscapeLabel(const std::string& value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

// {a="x",b="y"}, with one more label when `extra_key` is not empty.
std::string RenderLabels(const MetricLabels& labels, const std::string& extra_key = "",
                         const std::string& extra_value = "") {
  std::string out;
  for (const auto& [key, value] : labels) {
    out += fmt::format("{}{}=\"{}\"", out.empty() ? "" : ",", key, EscapeLabel(value));
  }
  if (!extra_key.empty()) {
    out += fmt::format("{}{}=\"{}\"", out.empty() ? "" : ",", extra_key, extra_value);
  }
  return out.empty() ? "" : "{" + out + "}";
}

void RenderHistogram(const std::string& name, const MetricLabels& labels,
                     const Histogram& histogram, std::string* out) {
  uint64_t cumulative = 0;
  for (size_t i = 0; i < histogram.upper_bounds().size(); ++i) {
    cumulative += histogram.bucket_count(i);
    *out += fmt::format("{}_bucket{} {}\n", name,
                        RenderLabels(labels, "le", fmt::format("{}", histogram.upper_bounds()[i])),
                        cumulative);
  }
  cumulative += histogram.bucket_count(histogram.upper_bounds().size());
  *out += fmt::format("{}_bucket{} {}\n", name, RenderLabels(labels, "le", "+Inf"), cumulative);
  *out += fmt::format("{}_sum{} {}\n", name, RenderLabels(labels), histogram.sum());
  *out += fmt::format("{}_count{} {}\n", name, RenderLabels(labels), cumulative);
}

}  // namespace

Histogram::Histogram(std::vector<double> upper_bounds)
    : upper_bounds_(std::move(upper_bounds)), counts_(upper_bounds_.size() + 1) {
  CHECK(std::is_sorted(upper_bounds_.begin(), upper_bounds_.end()));
}

void Histogram::Observe(double value) {
  const auto it = std::lower_bound(upper_bounds_.begin(), upper_bounds_.end(), value);
  counts_[static_cast<size_t>(std::distance(upper_bounds_.begin(), it))].fetch_add(
      1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

MetricsRegistry::MetricsRegistry() = default;
MetricsRegistry::~MetricsRegistry() = default;

MetricsRegistry::Series& MetricsRegistry::FindOrAdd(const std::string& name,
                                                    const std::string& help, const char* type,
                                                    MetricLabels labels) {
  const auto family_it = std::find_if(families_.begin(), families_.end(),
                                      [&](const auto& f) { return f->name == name; });
  Family* family = nullptr;
  if (family_it == families_.end()) {
    families_.push_back(std::make_unique<Family>(Family{name, help, type, {}}));
    family = families_.back().get();
  } else {
    family = family_it->get();
    CHECK_EQ(family->type, type);
  }
  for (const auto& series : family->series) {
    if (series->labels == labels) return *series;
  }
  family->series.push_back(std::make_unique<Series>());
  family->series.back()->labels = std::move(labels);
  return *family->series.back();
}

Counter& MetricsRegistry::AddCounter(const std::string& name, const std::string& help,
                                     MetricLabels labels) {
  std::lock_guard lock(mutex_);
  Series& series = FindOrAdd(name, help, "counter", std::move(labels));
  if (!series.counter) series.counter = std::make_unique<Counter>();
  return *series.counter;
}

Gauge& MetricsRegistry::AddGauge(const std::string& name, const std::string& help,
                                 MetricLabels labels) {
  std::lock_guard lock(mutex_);
  Series& series = FindOrAdd(name, help, "gauge", std::move(labels));
  if (!series.gauge) series.gauge = std::make_unique<Gauge>();
  return *series.gauge;
}

Histogram& MetricsRegistry::AddHistogram(const std::string& name, const std::string& help,
                                         std::vector<double> upper_bounds, MetricLabels labels) {
  std::lock_guard lock(mutex_);
  Series& series = FindOrAdd(name, help, "histogram", std::move(labels));
  if (!series.histogram) series.histogram = std::make_unique<Histogram>(std::move(upper_bounds));
  return *series.histogram;
}

std::string MetricsRegistry::ExposeText() const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& family : families_) {
    const std::string name = family->type == "counter" ? family->name + "_total" : family->name;
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, family->help, name, family->type);
    for (const auto& series : family->series) {
      if (series->counter) {
        out +=
            fmt::format("{}{} {}\n", name, RenderLabels(series->labels), series->counter->value());
      } else if (series->gauge) {
        out += fmt::format("{}{} {}\n", name, RenderLabels(series->labels), series->gauge->value());
      } else {
        RenderHistogram(name, series->labels, *series->histogram, &out);
      }
    }
  }
  return out;
}

}  // namespace fathom
