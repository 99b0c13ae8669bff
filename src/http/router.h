// Router: (method, path) to a handler. Filled before the server starts, then only read; any thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "http/response_writer.h"

namespace fathom::http {

class Router {
 public:
  struct Route {
    std::string pattern;
    std::map<std::string, Handler, std::less<>> handlers;  // by method

    // A HEAD is answered by the GET handler. Null: the method is not allowed.
    const Handler* FindHandler(std::string_view method) const;
    std::string AllowedMethods() const;  // for the Allow header
  };

  // `pattern`: an exact path, or "/prefix/*", whose star matches one or more characters.
  void Add(std::string method, const std::string& pattern, Handler handler);
  // Fills request->route and request->path_tail. Null: no such path.
  const Route* Find(Request* request) const;

 private:
  std::map<std::string, Route, std::less<>> routes_;
};

}  // namespace fathom::http
