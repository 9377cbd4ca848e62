// What main.c does, in C++: opens a bundle, feeds zeros, runs once, and prints names, types and sizes of the outputs.
#include <cstdlib>
#include <iostream>

#include "session.hpp"

int main(int count, char** words) {
  if (count != 2) {
    std::cerr << "usage: main_cpp BUNDLE\n";
    return EXIT_FAILURE;
  }
  try {
    hybridc::Session session(words[1]);
    std::map<std::string, hybridc::Array> feeds;
    for (const hybridc::Port& port : session.Inputs()) feeds[port.name] = port.Zeros();
    const std::map<std::string, hybridc::Array> results = session.Run(feeds);
    for (const hybridc::Port& port : session.Outputs()) {
      const hybridc::Array& result = results.at(port.name);
      std::cout << port.name << ": " << result.dtype << ", " << result.data.size() << " bytes\n";
    }
    return EXIT_SUCCESS;
  } catch (const hybridc::Error& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
