#include "http/router.h"

#include <utility>

namespace fathom::http {

const Handler* Router::Route::FindHandler(std::string_view method) const {
  auto it = handlers.find(method);
  if (it == handlers.end() && method == "HEAD") it = handlers.find("GET");
  return it == handlers.end() ? nullptr : &it->second;
}

std::string Router::Route::AllowedMethods() const {
  std::string out = "OPTIONS";
  for (const auto& [method, handler] : handlers) {
    out += ", " + method;
    if (method == "GET") out += ", HEAD";
  }
  return out;
}

void Router::Add(std::string method, const std::string& pattern, Handler handler) {
  Route& route = routes_[pattern];
  route.pattern = pattern;
  route.handlers[std::move(method)] = std::move(handler);
}

const Router::Route* Router::Find(Request* request) const {
  auto it = routes_.find(request->path);
  if (it == routes_.end()) {
    // The longest "/prefix/*" that fits: cut the path at its slashes from the right.
    for (size_t slash = request->path.rfind('/'); slash != std::string::npos && it == routes_.end();
         slash = slash == 0 ? std::string::npos : request->path.rfind('/', slash - 1)) {
      it = routes_.find(request->path.substr(0, slash + 1) + "*");
      if (it != routes_.end()) request->path_tail = PercentDecode(request->path.substr(slash + 1));
    }
  }
  if (it == routes_.end() || (it->first.back() == '*' && request->path_tail.empty()))
    return nullptr;
  request->route = it->first;
  return &it->second;
}

}  // namespace fathom::http
